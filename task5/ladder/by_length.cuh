// Which cluster has which pair, where a sequence's pairs have as many clusters as its length asks for: one, or a power of
// two of a sequence that is much longer than the others. Lengths are known on the GPU alone, so each warp looks at all.
#pragma once
#include "count.cuh"
#include "decode.cuh"

// Of C clusters that the GPU holds at once each would have the C-th part of all keys, its share. A pair with more than two
// shares is cut for clusters that have from one to two each: fewer than C all together. These and the whole pairs are a
// grid's items, long ones first. It has a cluster for each pair, and C at least: if there are more items, a cluster that
// is done takes a further one.
//
// A cluster first takes the pair of its number, as if none was cut, and looks at all lengths while its first tiles are on
// the way. If one is cut it begins once more, as where its own length has changed.
struct ByLength {
  static constexpr bool BY_LENGTH = true;
  static constexpr int HELD = 4, MOST_BITS = 4;  // sequences of a lane; 1 << MOST_BITS clusters of a pair, at most
  static constexpr int LEAST_BITS = 2;           // a cluster has so many tiles for each warp at least: 1 << LEAST_BITS
  int2 own;  // the lengths of this cluster's sequence
  bool any;  // or it has nothing to do

  DEVICE void start(int block_bits) { item = blockIdx.x >> block_bits, items = 0; }
  DEVICE void find(const Decode& a, int block_bits) {
    const int pairs = a.pairs();
    if (items == 0) {
      any = item < a.batch * pairs, part = bits_ = 0;
      sequence_ = any ? item / pairs : 0, pair_ = any ? item - sequence_ * pairs : 0;
      own = lengths(a, sequence_);
    } else {
      find_item(a, block_bits);
    }
  }
  DEVICE void read_again(const Decode& a) {
    now = lengths(a, sequence_);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      all[i] = make_int2(0, 0);
      if (32 * i < a.batch) all[i] = lengths(a, min(sequence_of_lane(i), a.batch - 1));
    }
  }
  // Whether no pair is cut, and the own length is what it was. Else find() counts the items.
  DEVICE bool holds(const Decode& a, int block_bits) {
    const bool cut = Shares(a, all, block_bits).cut();
    if (cut) items = 1;
    return !cut && now.x == own.x && now.y == own.y;
  }
  DEVICE int b() const { return sequence_; }
  DEVICE int pair() const { return pair_; }       // of the sequence's
  DEVICE int cluster(int) const { return part; }  // of the pair's 1 << bits(a)
  DEVICE int bits(const Decode&) const { return bits_; }
  DEVICE int64_t first(const Decode&, int) const { return item - part; }

  // Whether clusters take further items.
  DEVICE bool more(int block_bits) const { return items > grid(block_bits); }
  // The next one, or -1. It is counted behind the pairs' counters: in each launch once for every item, as each cluster
  // comes once in vain.
  DEVICE int take(const Decode& a, int block_bits) const {
    int* counter = &a.counters[a.batch * a.pairs() << block_bits];
    const int taken = add_acquire_release(counter, 1), further = grid(block_bits) + taken;
    if (taken == items - 1) *counter = 0;  // for the next launch
    return further < items ? further : -1;
  }
  DEVICE void go_on(int further) { item = further; }

 private:
  int item, items;  // this cluster's; of all, 0 where no pair is cut
  int sequence_, pair_, part, bits_;
  int2 now, all[HELD];  // lengths after the launch ahead of this one is complete: own ones; of the lane's sequences

  static DEVICE int grid(int block_bits) { return gridDim.x >> block_bits; }  // clusters
  static DEVICE int sequence_of_lane(int i) { return threadIdx.x % 32 + 32 * i; }

  // The tiles of each of the lane's sequences, and how they are cut.
  struct Shares {
    int tiles[HELD], longest = 0;
    int64_t shares;  // of all tiles, times C
    int C, least;

    DEVICE Shares(const Decode& a, const int2 (&lengths)[HELD], int block_bits) {
      int sum = 0;
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        tiles[i] = sequence_of_lane(i) < a.batch ? sequence(a, lengths[i]).tiles : 0;
        sum += tiles[i], longest = max(longest, tiles[i]);
      }
      shares = int64_t(__reduce_add_sync(~0u, sum)) * a.pairs(), longest = __reduce_max_sync(~0u, longest);
      C = a.clusters_at_once, least = 1 + LEAST_BITS + block_bits + WARP_BITS;
    }
    DEVICE bool above(int tiles, int log2_shares) const { return int64_t(tiles) * C > shares << log2_shares; }
    // 1 << bits clusters for a pair.
    DEVICE int bits(int tiles) const {
      int bits = 0;
#pragma unroll
      for (int n = 0; n < MOST_BITS; ++n) bits += above(tiles, n + 1) && tiles >> (n + least) > 0;
      return bits;
    }
    DEVICE bool cut() const { return above(longest, 1) && longest >> least > 0; }
  };

  DEVICE void find_item(const Decode& a, int block_bits) {
    const int lane = threadIdx.x % 32, pairs = a.pairs();
    int2 of_lane[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) of_lane[i] = lengths(a, min(sequence_of_lane(i), a.batch - 1));
    const Shares shares(a, of_lane, block_bits);
    // Items are in three groups: those of cut pairs; pairs of more than a share; and the rest. How many there are in each
    // of a sequence, for one of its pairs, are 12, 8 and 8 bits of a number.
    constexpr int LONG = 12, SHORT = 20;
    int bits_of[HELD], items_of[HELD], here = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      bits_of[i] = shares.bits(shares.tiles[i]);
      const int group = bits_of[i] > 0 ? 0 : shares.above(shares.tiles[i], 0) ? LONG
                                                                              : SHORT;
      items_of[i] = shares.tiles[i] > 0 ? 1 << (bits_of[i] + group) : 0, here += items_of[i];
    }
    int up_to = here;  // this lane
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, up_to, step);
      if (lane >= step) up_to += other;
    }
    const int last = __shfl_sync(~0u, up_to, 31);
    const int cut = last & ((1 << LONG) - 1), long_ = last >> LONG & ((1 << (SHORT - LONG)) - 1), short_ = last >> SHORT;
    items = (cut + long_ + short_) * pairs, any = item < items;
    int n = any ? item / pairs : 0, before = 0, group = 0;  // n: of its group
    if (n >= cut + long_)
      before = cut + long_, group = SHORT;
    else if (n >= cut)
      before = cut, group = LONG;
    n -= before;
    const auto of_group = [&](int number) {
      return number >> group & (group == LONG ? (1 << (SHORT - LONG)) - 1 : (1 << LONG) - 1);
    };
    const int its_lane = min(__popc(__ballot_sync(~0u, of_group(up_to) <= n)), 31);
    int first = of_group(up_to - here), index = 0;
#pragma unroll
    for (int i = 0; i < HELD - 1; ++i) {
      if (index == i && first + of_group(items_of[i]) <= n) first += of_group(items_of[i]), ++index;
    }
    index = __shfl_sync(~0u, index, its_lane), first = __shfl_sync(~0u, first, its_lane);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int x = __shfl_sync(~0u, of_lane[i].x, its_lane), y = __shfl_sync(~0u, of_lane[i].y, its_lane);
      const int bits = __shfl_sync(~0u, bits_of[i], its_lane);
      if (index == i) own = make_int2(x, y), bits_ = bits;
    }
    sequence_ = its_lane + 32 * index;
    const int of_sequence = any ? item - (before + first) * pairs : 0;
    pair_ = of_sequence >> bits_, part = of_sequence & ((1 << bits_) - 1);
  }
};
