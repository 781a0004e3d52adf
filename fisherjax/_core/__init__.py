"""What every module uses and no user calls: checks, linear algebra, caching, the compiler."""
