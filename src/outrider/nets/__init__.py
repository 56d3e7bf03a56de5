"""The small networks that drafters are made of: a decoder layer, Mamba, and Mamba's scan."""
