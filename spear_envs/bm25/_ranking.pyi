from spear_envs.bm25.ranking import Rank

rank_hits: Rank
