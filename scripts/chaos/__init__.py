"""Does a running stack harm, one way at a time, and checks that runs only lose time by it."""
