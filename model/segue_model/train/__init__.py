"""A decoder from nothing: text in, a folder out that the server serves. `python -m segue_model.train --help`.

Reading order: text (tokens and windows), recipe (the loop), export (the folder), curve (the picture), __main__.
"""
