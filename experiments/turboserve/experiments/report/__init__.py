"""`turboserve bench report`: one HTML page from the results of experiments."""
