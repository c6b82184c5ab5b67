"""``spear doctor``: checks of the installation and the machine."""
