"""Plans a run: its communication and its memory, without a device (`--plan`)."""
