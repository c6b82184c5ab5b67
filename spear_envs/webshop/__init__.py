"""WebShop: a shop of up to 1.18 million products with the pages, search and rewards of the original, without a JVM."""
