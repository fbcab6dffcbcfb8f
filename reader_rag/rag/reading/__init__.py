"""Files as text. Parsers of complex formats run in a process of their own, which is ended when it exceeds its limits.

Nothing here imports LlamaIndex before a format needs it: the process starts in a tenth of a second.
"""
