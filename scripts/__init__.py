"""What a developer or a newcomer runs from the root of the tree."""
