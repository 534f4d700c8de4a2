"""One file a change, oldest first. A file that has landed is never edited."""
