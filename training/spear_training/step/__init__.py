"""A training step of SPEAR, independent of verl: from records of episodes to optimiser steps."""
