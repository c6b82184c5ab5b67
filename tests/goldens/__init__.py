"""What the project prints, sends and writes today, kept in files: it is compared after the inside has moved."""
