"""How fast shardtree is, beside raw system calls and its peers: each module measures one job and prints ratios."""
