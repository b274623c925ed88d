"""Many machines. In: a stack and nodes. Out: one verdict; and what to expect of more of them."""
