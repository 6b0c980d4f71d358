"""How ranks come to be: started on this machine, brought together at a store, and told who has left.

launcher   starts ranks on this machine for a function
meeting    what ranks write in the store that they meet at: the name of a start, who has left
interface  which network leads to the other ranks
"""
