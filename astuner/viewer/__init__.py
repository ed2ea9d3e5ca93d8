"""Web page that shows runs, episodes, timelines and tokens. The viewer never writes to a record."""
