// CHECK(condition) and CHECK_EQUAL(found, expected): print what failed and count it.
#pragma once

#include <iostream>

inline int failures = 0;

#define CHECK(condition) \
  ((condition) ? (void)0 : (void)(++failures, std::cerr << __FILE__ << ':' << __LINE__ << ": " << #condition << '\n'))

#define CHECK_EQUAL(found, expected)                                                                       \
  ((found) == (expected) ? (void)0                                                                         \
                         : (void)(++failures, std::cerr << __FILE__ << ':' << __LINE__ << ": " << #found   \
                                                        << " is " << (found) << "; expected " << (expected) \
                                                        << '\n'))
