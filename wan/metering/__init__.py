"""Optional measurements of a run: power readings, and the order of exchanges and attention."""
