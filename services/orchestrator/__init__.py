"""Takes runs over REST and decides what happens next; it never touches a tensor."""
