"""`turboserve bench migration`: what moving a live session costs its viewer."""
