"""The web page that shows runs, episodes, timelines and tokens; it only reads, and never writes into a record."""
