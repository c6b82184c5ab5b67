"""The embedded knowledge base: invented worlds, passages about them, and questions of one, two and three hops."""
