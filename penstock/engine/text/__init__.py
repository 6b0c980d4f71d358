"""Text, pass after pass of forwards: what comes of each is the next one's last token.

generation  the passes, and how a token is chosen
cache       what layers keep of earlier tokens meanwhile
"""
