"""The reduction study: a script for each protocol of the paper, and what the paper left open."""
