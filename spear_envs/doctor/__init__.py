"""``spear doctor``: is this installation, and this machine, one on which the project works?"""
