"""Settings of the project's own models and studies, as plain Python."""
