from spear_envs.webshop.search.ranking import Rank

rank: Rank
