"""Ranks of this machine: started, watched, and begun again when one has failed.

launcher   starts ranks for a function, and again
ranks      their processes: started, watched, gone at the end
attempt    what became of one start of all ranks, and because of which
work       the function that ranks run, as bytes
rank_main  what each of those runs
server     the process that ranks are forked from
in_server  how that ends with its program
store      the store that launched ranks meet at, where nobody else comes to
"""
