"""The composition root: processes, doors and the command line. May import every folder."""
