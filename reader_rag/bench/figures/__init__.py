"""`reader-rag bench report`: one command for the figures of README and docs."""
