from spear_envs.bm25.index import Rank

rank_hits: Rank
