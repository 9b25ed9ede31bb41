"""`segue top`: what a server does, live, in a terminal.

source    asks the server, over the RPCs that everybody may call, and its admin port where it is given
snapshot  what was answered, at one moment
history   rates: differences of two snapshots
table     which sessions in which order, and their columns
figures   numbers, bars and sparklines as text
panels    text put together; app, turns_screen, help_screen: what textual needs to know

Everything but the last line is plain data and functions of it.
"""
