"""Several turns: tools that a model calls, how it writes a call, and the loop in which it reads the answers.

A response is the model's own tokens and, between them, those of tools: ids are put one after the other and never made
anew from a text, and a mask says which are the model's.
"""
