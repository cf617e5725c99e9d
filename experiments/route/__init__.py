"""The route study: a script for each measurement of the paper, and what the paper left open."""
