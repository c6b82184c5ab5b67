"""Episodes served over HTTP: any program that speaks to a model server can play, and all its tokens are recorded."""
