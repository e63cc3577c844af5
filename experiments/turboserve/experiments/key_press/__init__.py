"""From a key press to the pixel that shows it, in a real browser."""
