// axes by name, a combined cut, and dimensions past the spec
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x8xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}, %arg1: tensor<8x8xf32> {mhlo.sharding = "{devices=[1,8]<=[2,4]T(1,0)}"}, %arg2: tensor<8x8x2xf32> {mhlo.sharding = "{devices=[4,1,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"}) -> (tensor<8x8xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}, tensor<8x8xf32> {mhlo.sharding = "{replicated}"}, tensor<8x8x2xf32> {mhlo.sharding = "{devices=[1,2,1,4]<=[8] last_tile_dim_replicate}"}) {
    return %arg0, %arg1, %arg2 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8x2xf32>
  }
}
