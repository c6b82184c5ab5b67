"""A pretrained model on the field's own tasks: three arms, several seeds, records that anybody can recompute."""
