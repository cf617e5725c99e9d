"""Results on disk: tables, and later figures and reports."""
