"""The store to which completed videos move."""
