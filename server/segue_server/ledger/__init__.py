"""The durable ledger: sessions, turns, tokens, settings and tombstones in one SQLite file.

records.py    what can be written, one frozen dataclass each
journal.py    what the engine has noted in the step in progress
gate.py       between engine and event loop: no event passes before the records of its step are in the file
writer.py     the thread that commits: everything that waits, in one transaction
store.py      the file: open, apply, recover
changes.py    one transaction, record by record
mirror.py     what the store knows of the file without asking it
schema.py     tables, and what is checked when a file is opened
codec.py      settings and tokens as they lie in the file
"""
