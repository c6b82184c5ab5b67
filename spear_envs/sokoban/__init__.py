"""Sokoban: gym-sokoban's dynamics, rewards and pictures, with levels of known solution length."""
