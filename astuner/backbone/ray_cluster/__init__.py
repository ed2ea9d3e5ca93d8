"""The Ray instance that a backbone runs on: started for the run, or an existing one."""
