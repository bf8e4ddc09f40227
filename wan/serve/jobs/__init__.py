"""Jobs, their journal and their files."""
