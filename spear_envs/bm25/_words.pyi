from spear_envs.bm25.postings import NumberWords

number_words: NumberWords
