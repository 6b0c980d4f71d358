"""How ranks come to be: started on this machine, brought together at a store, begun again when one has failed.

launcher   starts ranks on this machine for a function, and again
ranks      their processes: started, watched, gone at the end
work       the function that ranks run, as bytes
rank_main  what each of those runs
server     the process that ranks are forked from
gpus       which of the ranks have a GPU of their own
in_server  how that ends with its program
attempt    what became of one start of all ranks, and because of which
store      the store that launched ranks meet at, where nobody else comes to
meeting    what ranks write in the store that they meet at: the name of a start, who has left
interface  which network leads to the other ranks
"""
