"""Episodes behind an address: any program that speaks to a model server plays them, and every token it used is kept."""
