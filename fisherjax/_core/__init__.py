"""Internal tools of all modules: argument checks, linear algebra, caching, the compiler."""
