"""Small helpers: log, machine, environment variables, trace, files written whole."""
