"""The nouns that server and clients share, and the one way in which updates come together."""
