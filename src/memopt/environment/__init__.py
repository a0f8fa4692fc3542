"""The surroundings of memopt: untrusted files, the hub, the process, tools that partition parameters."""
