"""What carries out a run, whoever asks: command line, service, Python classes, tools."""
