"""A training step of SPEAR as an object that knows nothing of verl: from records of episodes to optimiser steps."""
