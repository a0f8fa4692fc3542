"""What surrounds memopt: strangers' files, the hub, the process, tools that partition its parameters."""
